"""Python environments that pools run from: their recipes, how they are created, and our code on their path."""
