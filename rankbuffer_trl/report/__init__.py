"""What a run's store tells afterwards: numbers, tables, figures."""
