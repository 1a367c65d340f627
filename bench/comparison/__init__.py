"""Side-by-side measurement of Millstream and its peers; `bench/compare.py` is the way in."""
