"""AlpacaEval 2."""
