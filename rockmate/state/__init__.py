"""State that a forward may read and change, taken at one time and put back later."""
