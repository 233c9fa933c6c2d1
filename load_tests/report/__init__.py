"""What a run looks like: summary (text), result (JSON), html (one page with plots); compare puts two results side by
side. series has the numbers that plots draws. tables: titled tables of any figures, for a terminal and as Markdown."""
