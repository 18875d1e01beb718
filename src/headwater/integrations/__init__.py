"""Other engines and trainers. They import the library. Nothing in the library imports them."""
