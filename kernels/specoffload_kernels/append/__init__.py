"""Writing of new tokens into arena slots."""
