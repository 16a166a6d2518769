"""Reading pictures: their format, their header, and the pixels of their frames."""
