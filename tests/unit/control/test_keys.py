"""Signatures that others can check, and tokens that nobody else can make."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from millstream.control.limits import TOKEN_LIFETIME_MS
from millstream.control.subscriptions.keys import Keys
from millstream.control.subscriptions.model import Refused


def unpad(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_signature_verifies_with_the_published_key_only_for_its_body_and_time() -> None:
    keys = Keys.generate()
    (jwk,) = keys.jwks()["keys"]
    header = keys.signature_header(b'{"a":1}', 1_700_000_000_999)
    parts = dict(part.split("=", 1) for part in header.split(","))
    assert (parts["t"], parts["kid"]) == ("1700000000", jwk["kid"])
    public = Ed25519PublicKey.from_public_bytes(unpad(jwk["x"]))
    public.verify(unpad(parts["ed25519"]), b'1700000000.{"a":1}')
    with pytest.raises(InvalidSignature):
        public.verify(unpad(parts["ed25519"]), b'1700000001.{"a":1}')


def test_the_key_id_is_the_thumbprint_and_nothing_secret_is_published() -> None:
    keys = Keys.generate()
    (jwk,) = keys.jwks()["keys"]
    required = json.dumps(
        {"crv": jwk["crv"], "kty": jwk["kty"], "x": jwk["x"]}, separators=(",", ":")
    )
    digest = hashlib.sha256(required.encode()).digest()
    assert jwk["kid"] == "ds_" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert set(jwk) == {"kty", "crv", "alg", "use", "kid", "x"}


def test_keys_survive_being_stored() -> None:
    keys = Keys.generate()
    again = Keys.from_record(json.loads(json.dumps(keys.to_record())))
    assert again.jwks() == keys.jwks()
    assert again.open_token(keys.mint_token("u", 3, 1000), 1001) == ("u", 3)


def test_a_token_opens_for_its_server_until_it_expires() -> None:
    keys = Keys.generate()
    token = keys.mint_token("uid", 5, 1000)
    assert keys.open_token(token, 1000 + TOKEN_LIFETIME_MS - 1) == ("uid", 5)
    with pytest.raises(Refused) as caught:
        keys.open_token(token, 1000 + TOKEN_LIFETIME_MS)
    assert (caught.value.status, caught.value.code) == (401, "TOKEN_EXPIRED")
    with pytest.raises(Refused) as caught:
        Keys.generate().open_token(token, 1001)
    assert (caught.value.status, caught.value.code) == (401, "TOKEN_INVALID")


@pytest.mark.parametrize("broken", ["", ".", "a", "a.b", "é.é", "x" * 5000, "e30.", "e30.e30"])
def test_a_malformed_token_is_invalid(broken: str) -> None:
    with pytest.raises(Refused) as caught:
        Keys.generate().open_token(broken, 0)
    assert caught.value.code == "TOKEN_INVALID"


def test_a_changed_token_is_invalid() -> None:
    keys = Keys.generate()
    payload, mac = keys.mint_token("uid", 5, 1000).split(".")
    claims = json.loads(unpad(payload))
    claims["g"] = 6
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    with pytest.raises(Refused):
        keys.open_token(f"{forged}.{mac}", 1001)
