"""Options that are declared once, as fields of dataclasses."""
