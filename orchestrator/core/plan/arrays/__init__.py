"""Jobs, islands and memory as NumPy arrays, and algorithms on them: prices, knapsack, rates, device numbers."""
