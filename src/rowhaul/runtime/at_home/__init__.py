"""Rows that stay at home: ranks ask for the rows of their samples and hand gradients over, without a plan."""
