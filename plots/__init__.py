"""Draws run records as figures and tables. Reads only the JSON, and needs NumPy alone, for figures
matplotlib, for the page Jinja2. May import common/."""
