"""transformers: one call moves a model's attention onto our paged latent cache, one call takes it back."""

from anymla.integrations.transformers.versions import check_version

check_version()

from anymla.integrations.transformers.attach import Attachment, attach  # noqa: E402
from anymla.integrations.transformers.cache import PagedLatentLayer  # noqa: E402

__all__ = ["Attachment", "PagedLatentLayer", "attach"]
