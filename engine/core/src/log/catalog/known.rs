//! Which paths the catalog may have, in two bytes per path.
//!
//! Most paths that are not in memory are new ones, and a reactor must not ask the disk about them. This is a Bloom filter:
//! "no" is certain, "perhaps" is wrong for about one new path in a hundred (and for names that were removed since the
//! start), which only costs a look. Filled by the walk through the catalog that follows every start, and by commits.
//!
//! Invariant: until that walk is complete every path may be there; from then on every path that the catalog has.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

/// Paths that the first layer is made for; each further one has twice as many.
const FIRST_PATHS: usize = 32 * 1024;
const PATHS_PER_WORD: usize = 4;
const BITS_PER_PATH: u32 = 4;

#[derive(Default)]
pub struct Known {
    layers: RwLock<Vec<Layer>>,
    complete: AtomicBool,
    hasher: RandomState,
}

struct Layer {
    words: Box<[AtomicU64]>,
    paths: AtomicUsize,
}

impl Layer {
    fn new(paths: usize) -> Layer {
        let words = (0..paths / PATHS_PER_WORD).map(|_| AtomicU64::new(0));
        Layer {
            words: words.collect(),
            paths: AtomicUsize::new(0),
        }
    }

    /// The word that tells about a path, and its bits there.
    fn place(&self, hash: u64) -> (&AtomicU64, u64) {
        let bits = (0..BITS_PER_PATH).fold(0, |bits, at| bits | 1 << (hash >> (6 * at) & 63));
        let word = (hash >> (6 * BITS_PER_PATH)) as usize % self.words.len();
        (&self.words[word], bits)
    }

    fn has(&self, hash: u64) -> bool {
        let (word, bits) = self.place(hash);
        word.load(Ordering::Acquire) & bits == bits
    }

    fn is_full(&self) -> bool {
        self.paths.load(Ordering::Relaxed) >= self.words.len() * PATHS_PER_WORD
    }
}

impl Known {
    pub fn add(&self, path: &[u8]) {
        let hash = self.hasher.hash_one(path);
        {
            let layers = self.layers.read();
            if layers.iter().any(|layer| layer.has(hash)) {
                return;
            }
            if let Some(layer) = layers.last().filter(|layer| !layer.is_full()) {
                let (word, bits) = layer.place(hash);
                word.fetch_or(bits, Ordering::AcqRel);
                layer.paths.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        let mut layers = self.layers.write();
        if layers.last().is_none_or(Layer::is_full) {
            let paths = FIRST_PATHS << layers.len();
            layers.push(Layer::new(paths));
        }
        drop(layers);
        self.add(path);
    }

    /// Everything that the catalog had at the start has been added.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    pub fn may_have(&self, path: &[u8]) -> bool {
        if !self.complete.load(Ordering::Acquire) {
            return true;
        }
        let hash = self.hasher.hash_one(path);
        self.layers.read().iter().any(|layer| layer.has(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_known_and_hardly_any_other() {
        let known = Known::default();
        assert!(known.may_have(b"anything"), "the walk is not complete");
        let count = 5 * FIRST_PATHS;
        let path = |number: usize| format!("orders/{number}").into_bytes();
        (0..count).for_each(|number| known.add(&path(number)));
        known.complete();
        assert!((0..count).all(|number| known.may_have(&path(number))));
        let wrong = (count..2 * count).filter(|number| known.may_have(&path(*number)));
        assert!(wrong.count() * 20 < count);
        // Added again on every checkpoint: that takes no room.
        let before = known.layers.read().len();
        (0..count).for_each(|number| known.add(&path(number)));
        assert_eq!(known.layers.read().len(), before);
    }
}
