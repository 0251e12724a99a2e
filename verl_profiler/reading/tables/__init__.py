"""Tables that the analyses query: their columns and their SQL."""
