"""What a person or a script does with a gateway."""
