"""Changes offers of prefill engines, as a router or a user can who knows the key of the seal."""

from cascadekv._native import user_token
from cascadekv.connectors.vllm.offers import Offer, OfferError


def with_own(params, *, key=None, **changed):
    """Return params whose Cascade part is changed, sealed again."""
    return sealed({**params, "cascade": {**params["cascade"], **changed}}, key)


def sealed(params, key=None):
    """Return params that are sealed with a key, or this user's; unchanged if they are no offer."""
    try:
        offer = Offer.parse(params, None, tokens=params["remote_num_tokens"])
        return offer.params(user_token() if key is None else key)
    except (OfferError, ValueError):
        return params
