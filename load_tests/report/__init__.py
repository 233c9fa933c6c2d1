"""What a run looks like: table (text), result (JSON), html (one page with plots); compare puts two results side by
side. series has the numbers that plots draws."""
