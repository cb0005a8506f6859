"""Generate the reference pages of the documentation from the code that they describe."""
