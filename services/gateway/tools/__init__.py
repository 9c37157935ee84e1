"""Calls of tools in a model's text: a parser for each family's own form, and grammars that make a model use it."""
