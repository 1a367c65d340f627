//! Deliberate bugs that the simulation must catch: the test of its tests.
//!
//! A door like the others, but one that only the feature `sabotage` can open. Without it every question is answered
//! `false` at compile time, and nothing of this is left in the engine.

/// What a careless engine would do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Sabotage {
    /// Frames and batches count as whole without a look at their checksum.
    DropChecksum,
    /// Nothing tells a recycled file's old frames from new ones.
    ForgetGeneration,
    /// A group of frames is taken as far as it goes.
    SplitGroups,
    /// What recovery finds in the page cache counts as synced.
    TrustPageCache,
    /// No start begins a new epoch.
    SilentLoss,
    /// Readers see an append as soon as it is staged.
    ShowEarly,
    /// Appends do not wait for the create or the change of class in front of them.
    ForgetControl,
    /// A stage is acknowledged before it is on the device.
    StageUnsynced,
    /// A checkpoint drops removed streams without a word about where they ended.
    ForgetEndings,
    /// A fork's own bytes lie in the epoch of its source.
    ShareEpochs,
    /// Replay takes something else from a frame than the live request did.
    ReplayDiffers,
    /// A window that ends before a possible loss stands behind it.
    PlanSkipsGap,
    /// Bytes are looked for in the extent that was the last one before.
    StaleExtent,
}

#[cfg(feature = "sabotage")]
thread_local! {
    static ON: std::cell::Cell<Option<Sabotage>> = const { std::cell::Cell::new(None) };
}

/// Whether this thread works with this bug.
#[cfg(feature = "sabotage")]
pub fn is(bug: Sabotage) -> bool {
    ON.get() == Some(bug)
}

#[cfg(not(feature = "sabotage"))]
pub const fn is(_: Sabotage) -> bool {
    false
}

/// From here on this thread works with this bug, or with none.
#[cfg(feature = "sabotage")]
pub fn set(bug: Option<Sabotage>) {
    ON.set(bug);
}
