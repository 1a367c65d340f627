//! A refusal: what an operation answers instead of success. A stable code, one sentence, and the protocol
//! headers that go with it.

use std::borrow::Cow;

use crate::error::ErrorCode;
use crate::limits::REFUSAL_DETAIL_MAX_BYTES;
use crate::model::Offset;

/// An answer that is not success.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub code: ErrorCode,
    detail: Cow<'static, str>,
    pub headers: RefusalHeaders,
}

/// Protocol headers that some refusals carry.
#[derive(Debug, Clone, Default)]
pub struct RefusalHeaders {
    pub next_offset: Option<Offset>,
    pub closed: bool,
    pub producer_epoch: Option<u64>,
    pub producer_expected_and_received_seq: Option<(u64, u64)>,
    pub allow: Allow,
}

/// Which methods a path takes, for `Allow`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Allow {
    #[default]
    Stream,
    Post,
    PutAndDelete,
}

impl Allow {
    pub fn methods(self) -> &'static str {
        match self {
            Allow::Stream => "GET, HEAD, POST, PUT, DELETE, OPTIONS",
            Allow::Post => "POST",
            Allow::PutAndDelete => "PUT, DELETE",
        }
    }
}

impl Refusal {
    pub fn new(code: ErrorCode) -> Refusal {
        Refusal {
            code,
            detail: Cow::Borrowed(""),
            headers: RefusalHeaders::default(),
        }
    }

    pub fn with(code: ErrorCode, detail: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal::new(code).saying(detail)
    }

    /// The same with another detail. It may name what the client has sent, which may be long: it is cut.
    pub fn saying(mut self, detail: impl Into<Cow<'static, str>>) -> Refusal {
        self.detail = detail.into();
        if self.detail.len() > REFUSAL_DETAIL_MAX_BYTES {
            let end = self.detail.floor_char_boundary(REFUSAL_DETAIL_MAX_BYTES);
            self.detail = format!("{} ...", &self.detail[..end]).into();
        }
        self
    }

    /// The sentence a person reads: the detail, or the title where there is none.
    pub fn sentence(&self) -> &str {
        if self.detail.is_empty() {
            self.code.title()
        } else {
            &self.detail
        }
    }
}

impl From<ErrorCode> for Refusal {
    fn from(code: ErrorCode) -> Refusal {
        Refusal::new(code)
    }
}
