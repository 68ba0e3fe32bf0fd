"""Places of stack samples, added up and compared; the rules and `stoker why` read them."""
