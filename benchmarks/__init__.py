"""How fast is it, beside what people would use instead, and how close to what the machine can do."""
