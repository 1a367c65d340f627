"""The server's secrets: the Ed25519 key that signs webhooks and the secret behind worker tokens.

Sits beside `machine`; `manager` owns the one instance. Kept in the reserved stream `__ds/state/keys`, so
signatures, published keys and tokens stay valid across restarts. Invariant: nothing secret leaves this
module except through a signature or a token.

Token: base64url(JSON {"u": uid, "g": generation, "e": expiry ms}) "." base64url(HMAC-SHA256 of the first part).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from millstream.control.limits import TOKEN_LIFETIME_MS
from millstream.control.subscriptions.model import Refused

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_TOKEN_CHARS_MAX: Final = 1024


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _unb64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


class Keys:
    def __init__(self, signing_seed: bytes, token_secret: bytes) -> None:
        self._seed = signing_seed
        self._token_secret = token_secret

    @cached_property
    def _signing(self) -> Ed25519PrivateKey:
        # A server without webhooks signs nothing, and starts without the library.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._seed)

    @cached_property
    def _x(self) -> str:
        return _b64(self._signing.public_key().public_bytes_raw())

    @cached_property
    def kid(self) -> str:
        # RFC 7638: the thumbprint is over the required members in lexical order, without white space.
        thumbprint = json.dumps(
            {"crv": "Ed25519", "kty": "OKP", "x": self._x}, separators=(",", ":")
        )
        return "ds_" + _b64(hashlib.sha256(thumbprint.encode("ascii")).digest())

    @classmethod
    def generate(cls) -> Keys:
        return cls(secrets.token_bytes(32), secrets.token_bytes(32))

    def to_record(self) -> dict[str, str]:
        return {"signing_seed": _b64(self._seed), "token_secret": _b64(self._token_secret)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Keys:
        return cls(_unb64(record["signing_seed"]), _unb64(record["token_secret"]))

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        key = {
            "kty": "OKP",
            "crv": "Ed25519",
            "alg": "EdDSA",
            "use": "sig",
            "kid": self.kid,
            "x": self._x,
        }
        return {"keys": [key]}

    def signature_header(self, body: bytes, now_ms: int) -> str:
        timestamp = now_ms // 1000
        signature = self._signing.sign(b"%d.%s" % (timestamp, body))
        return f"t={timestamp},kid={self.kid},ed25519={_b64(signature)}"

    def mint_token(self, uid: str, generation: int, now_ms: int) -> str:
        claims = {"u": uid, "g": generation, "e": now_ms + TOKEN_LIFETIME_MS}
        payload = _b64(json.dumps(claims, separators=(",", ":")).encode("ascii"))
        return f"{payload}.{_b64(self._mac(payload))}"

    def open_token(self, token: str, now_ms: int) -> tuple[str, int]:
        """The (uid, generation) a token was made for."""
        invalid = Refused(401, "TOKEN_INVALID", "the token was not issued by this server")
        if len(token) > _TOKEN_CHARS_MAX:
            raise invalid
        payload, _, mac = token.partition(".")
        try:
            if not hmac.compare_digest(_unb64(mac), self._mac(payload)):
                raise invalid
            claims = json.loads(_unb64(payload))
        except (binascii.Error, ValueError) as error:
            raise invalid from error
        if claims["e"] <= now_ms:
            raise Refused(401, "TOKEN_EXPIRED", "the token has expired; wait for the next wake")
        return claims["u"], claims["g"]

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._token_secret, payload.encode("ascii", "replace"), "sha256")
