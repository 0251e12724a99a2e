"""Several columns of a row at once."""


def picked(row, names):
    """Return the values of these columns, whose names are separated by spaces."""
    return tuple(row[name] for name in names.split())
