//! One shared object per content type: most streams have one of a few.
//!
//! Asked by the directory for every stream that is created or loaded. Types that no stream has any more are swept away
//! when there are twice as many as after the last sweep, so that a flood of new ones costs amortised constant time.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::model::ContentType;

/// So many are kept without a look at them.
const SWEEP_MIN: usize = 1024;

#[derive(Default)]
pub struct Interned {
    types: RwLock<Types>,
}

#[derive(Default)]
struct Types {
    known: HashMap<Box<str>, Arc<ContentType>>,
    /// How many were left by the last sweep.
    left: usize,
    /// How many sweeps have looked at.
    #[cfg(test)]
    looked_at: usize,
}

impl Interned {
    pub fn get(&self, text: &str) -> Arc<ContentType> {
        if let Some(known) = self.types.read().known.get(text) {
            return Arc::clone(known);
        }
        let mut types = self.types.write();
        if types.known.len() >= SWEEP_MIN.max(2 * types.left) {
            types.sweep();
        }
        let new = || Arc::new(ContentType::new(text));
        Arc::clone(types.known.entry(text.into()).or_insert_with(new))
    }
}

impl Types {
    fn sweep(&mut self) {
        #[cfg(test)]
        {
            self.looked_at += self.known.len();
        }
        self.known.retain(|_, value| Arc::strong_count(value) > 1);
        self.left = self.known.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_types_looks_at_few_others() {
        let interned = Interned::default();
        let count = 20_000;
        let held: Vec<Arc<ContentType>> = (0..count)
            .map(|number| interned.get(&format!("text/x-{number}")))
            .collect();
        let again = interned.get("text/x-7");
        assert!(Arc::ptr_eq(&held[7], &again));
        let looked_at = interned.types.read().looked_at;
        assert!(looked_at <= 2 * count, "{looked_at} for {count} types");
    }

    #[test]
    fn types_that_nobody_has_leave() {
        let interned = Interned::default();
        let kept = interned.get("text/kept");
        for number in 0..100_000 {
            interned.get(&format!("text/x-{number}"));
        }
        assert!(interned.types.read().known.len() <= 2 * SWEEP_MIN);
        assert!(Arc::ptr_eq(&kept, &interned.get("text/kept")));
    }
}
