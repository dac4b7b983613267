"""Words to prompt grid: cleaning, normalising, splitting, tokenising, and the two prompt formats of the Fish family."""
