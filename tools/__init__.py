"""Tools of the checkout: they build its environment, and generate pages, figures and the site."""
