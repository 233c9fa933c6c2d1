"""What a run looks like: table (text), result (JSON), html (one page with plots); compare puts two results side by
side. series and svg serve html: what to draw, and how."""
