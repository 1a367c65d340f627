//! Segment file names.

use super::*;

#[test]
fn names_go_there_and_back() {
    let owner = StreamId(0xfeed_beef_0123_45ab);
    let name = path(owner, 18, Part::Index);
    assert_eq!(name, "segments/ab/feedbeef012345ab-00000012.idx");
    assert_eq!(
        parse_name("feedbeef012345ab-00000012.idx"),
        Some((owner, 18, Part::Index))
    );
    assert_eq!(
        parse_name("feedbeef012345ab-00000012.seg"),
        Some((owner, 18, Part::Data))
    );
}

#[test]
fn foreign_names_are_not_taken_for_segments() {
    for name in [
        "",
        ".seg",
        "x-1.seg",
        "feedbeef012345ab-00000012.tmp",
        "feedbeef012345ab.seg",
    ] {
        assert_eq!(parse_name(name), None, "{name:?}");
    }
}
