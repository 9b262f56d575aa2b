"""Commands of Forge. Each module reads as its pipeline and defines no classes."""
