"""What every room may need: the user error, reading JSON that nobody has checked yet, and writing files that
are whole or not there. Needs only the standard library, and imports nothing else of ours."""
