"""What every room may need: the user error, reading JSON that nobody has checked yet, writing files
that are whole or not there, and text. Needs only the standard library, and tabulate where a table is made;
imports nothing else of ours."""
