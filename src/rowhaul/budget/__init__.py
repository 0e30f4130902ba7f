"""Rows within a number of bytes: ids read most have rows of their own, all others share some."""

from rowhaul.budget.settings import BudgetSettings

__all__ = ["BudgetSettings"]
