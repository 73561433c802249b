"""Draws run records as figures and tables. Reads only the JSON, and needs matplotlib and NumPy alone. May
import common/."""
