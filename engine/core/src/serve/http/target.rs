//! The request target: reduced to path and query, and the bytes a host may consist of.
//!
//! Where it sits: below `serve/http`, called once per head.
//!
//! Invariants: the path is raw and starts with `/` (or is the `*` of `OPTIONS *`); a target that two
//! parsers could cut differently (fragments, bytes beyond ASCII) is refused.

use memchr::{memchr, memchr2};

use super::{HttpError, Method, TARGET_MAX_BYTES};

pub(super) type Target<'b> = (&'b [u8], Option<&'b [u8]>, Option<&'b [u8]>);

/// Path, query and, for an absolute-form target, the authority.
#[inline]
pub(super) fn split_target(target: &[u8], method: Method) -> Result<Target<'_>, HttpError> {
    if target.len() > TARGET_MAX_BYTES {
        return Err(HttpError::UriTooLong);
    }
    if !target.is_ascii() {
        return Err(HttpError::BadRequest(
            "bytes beyond ASCII in the target: percent-encode them",
        ));
    }
    let (authority, local) = match target {
        b"*" if method == Method::Options => return Ok((target, None, None)),
        [b'/', ..] => (None, target),
        _ => {
            let after_scheme = strip_scheme(target, b"http://")
                .or_else(|| strip_scheme(target, b"https://"))
                .ok_or(HttpError::BadRequest("the target is not a path"))?;
            let end = after_scheme
                .iter()
                .position(|byte| matches!(byte, b'/' | b'?' | b'#'));
            let (authority, local) = after_scheme.split_at(end.unwrap_or(after_scheme.len()));
            if authority.is_empty() {
                return Err(HttpError::BadRequest("the target has no host"));
            }
            (Some(authority), local)
        }
    };
    let (path, query) = match memchr2(b'?', b'#', local) {
        Some(mark) if local[mark] == b'?' => (&local[..mark], Some(&local[mark + 1..])),
        Some(_) => return Err(HttpError::BadRequest("fragment in the target")),
        None => (local, None),
    };
    if query.is_some_and(|query| memchr(b'#', query).is_some()) {
        return Err(HttpError::BadRequest("fragment in the target"));
    }
    Ok((if path.is_empty() { b"/" } else { path }, query, authority))
}

fn strip_scheme<'b>(target: &'b [u8], scheme: &[u8]) -> Option<&'b [u8]> {
    let (start, rest) = target.split_at_checked(scheme.len())?;
    start.eq_ignore_ascii_case(scheme).then_some(rest)
}

/// What a host with its port may consist of.
static HOST_BYTES: [bool; 256] = {
    let mut legal = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        legal[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let others = b"-._~:[]%!$&'()*+;=";
    let mut index = 0;
    while index < others.len() {
        legal[others[index] as usize] = true;
        index += 1;
    }
    legal
};

#[inline]
pub(super) fn is_host(text: &[u8]) -> bool {
    text.iter().all(|byte| HOST_BYTES[*byte as usize])
}
