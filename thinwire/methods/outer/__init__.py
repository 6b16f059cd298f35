"""The base of methods with an outer optimizer: when islands exchange, what they send, how the result is used."""
