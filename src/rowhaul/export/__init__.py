"""A trained model in files that other tools read, and reading them back."""
