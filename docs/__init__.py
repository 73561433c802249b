"""One page per subject, and what writes the generated pages. May import the keys and the exit statuses that
the reference lists."""
