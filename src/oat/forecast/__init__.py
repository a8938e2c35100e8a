"""What a run will cost before it begins: memory, prices, and the amounts of a step."""
