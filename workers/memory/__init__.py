"""How much memory a model will need, before anything of it is allocated: by tracing a module, or by formulas."""
