"""What is known about a torch function before any layout: its name, schema, parameters, traits and linearity."""
