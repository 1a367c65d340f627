//! What verification found: findings with file, byte and stream, counts, and nothing unbounded.

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Severity {
    /// Something promised is missing or wrong.
    Error,
    /// Worth knowing, no harm done: leftovers, a torn tail, a range that is already known to be damaged.
    Note,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Note => "note",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub severity: Severity,
    pub file: String,
    pub byte: Option<u64>,
    pub stream: Option<String>,
    pub what: String,
}

/// Findings of each severity that are kept; the rest is only counted.
const FINDINGS_KEPT: u64 = 1000;

#[derive(Clone, Default, Debug)]
pub struct Report {
    pub findings: Vec<Finding>,
    pub errors: u64,
    pub notes: u64,
    pub streams: u64,
    /// Bytes of streams whose checksums were looked at.
    pub stream_bytes: u64,
    pub appends: u64,
    pub log_files: u64,
    pub frames: u64,
    pub packs: u64,
    /// Errors that no repair can mend.
    pub beyond_repair: bool,
}

impl Report {
    pub fn is_clean(&self) -> bool {
        self.errors == 0
    }

    /// Adds what another look has found.
    pub fn take(&mut self, other: Report) {
        let kept = (other.errors, other.notes);
        let (errors, notes) = (self.errors, self.notes);
        other
            .findings
            .into_iter()
            .for_each(|finding| self.add(finding));
        (self.errors, self.notes) = (errors + kept.0, notes + kept.1);
        self.streams += other.streams;
        self.stream_bytes += other.stream_bytes;
        self.appends += other.appends;
        self.log_files += other.log_files;
        self.frames += other.frames;
        self.packs += other.packs;
        self.beyond_repair |= other.beyond_repair;
    }

    pub fn add(&mut self, finding: Finding) {
        let count = match finding.severity {
            Severity::Error => &mut self.errors,
            Severity::Note => &mut self.notes,
        };
        *count += 1;
        if *count <= FINDINGS_KEPT {
            self.findings.push(finding);
        }
    }

    pub fn error(&mut self, file: &str, byte: Option<u64>, what: impl Into<String>) {
        self.add(Finding {
            severity: Severity::Error,
            file: file.to_owned(),
            byte,
            stream: None,
            what: what.into(),
        });
    }

    pub fn note(&mut self, file: &str, byte: Option<u64>, what: impl Into<String>) {
        self.add(Finding {
            severity: Severity::Note,
            file: file.to_owned(),
            byte,
            stream: None,
            what: what.into(),
        });
    }

    pub fn stream_error(
        &mut self,
        file: &str,
        byte: Option<u64>,
        stream: &str,
        what: impl Into<String>,
    ) {
        self.add(Finding {
            severity: Severity::Error,
            file: file.to_owned(),
            byte,
            stream: Some(stream.to_owned()),
            what: what.into(),
        });
    }

    pub fn stream_note(&mut self, file: &str, stream: &str, what: impl Into<String>) {
        self.add(Finding {
            severity: Severity::Note,
            file: file.to_owned(),
            byte: None,
            stream: Some(stream.to_owned()),
            what: what.into(),
        });
    }
}
