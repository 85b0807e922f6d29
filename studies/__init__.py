"""Each published claim, tried on real text with seeds and pairs. `python -m studies` lists them; tables lie in
`results/`."""
