"""The pages of the site that are made from sources at build time; `docs/conf.py` asks for them."""

from collections.abc import Callable

from scripts.site_pages import api, chips, errors, settings

# By the name in a page's line `<!-- made by: NAME -->`: a function that returns Markdown.
PAGES: dict[str, Callable[[], str]] = {
    "api_core": api.core,
    "api_modules": api.modules,
    "api_debugging": api.debugging,
    "api_data": api.data,
    "errors": errors.page,
    "settings": settings.page,
    "chips": chips.page,
}
