//! Cuts a failing plan down to what it needs to fail, by trying without each part.

use crate::plan::{Life, Op, Plan};

/// `fails` runs a plan; at most `tries` times.
pub fn shrink(plan: &Plan, tries: usize, fails: &mut dyn FnMut(&Plan) -> bool) -> Plan {
    let mut best = plan.clone();
    let mut left = tries;
    loop {
        let mut improved = false;
        for smaller in smaller_plans(&best) {
            if left == 0 {
                return best;
            }
            left -= 1;
            if fails(&smaller) {
                best = smaller;
                improved = true;
                break;
            }
        }
        if !improved {
            return best;
        }
    }
}

/// Large cuts first.
fn smaller_plans(plan: &Plan) -> Vec<Plan> {
    let mut plans = Vec::new();
    let mut push = |edit: &dyn Fn(&mut Plan)| {
        let mut smaller = plan.clone();
        edit(&mut smaller);
        if smaller != *plan {
            plans.push(smaller);
        }
    };
    for life in 0..plan.lives.len() {
        push(&|plan| drop(plan.lives.remove(life)));
        push(&|plan| plan.lives[life].fault = None);
        push(&|plan| plan.lives[life].start_fault = None);
        push(&|plan| plan.lives[life].stillborn = None);
        push(&|plan| plan.lives[life].clock_set_back_ms = 0);
        push(&|plan| plan.lives[life].restored = false);
        push(&|plan| plan.lives[life].damages.clear());
        push(&|plan| plan.lives[life].damages.truncate(1));
    }
    for life in 0..plan.lives.len() {
        let count = plan.lives[life].ops.len();
        let mut step = count.div_ceil(2);
        while step > 0 {
            for from in (0..count).step_by(step).rev() {
                push(&|plan| drop(plan.lives[life].ops.drain(from..count.min(from + step))));
            }
            step /= 2;
        }
        for op in 0..count {
            push(&|plan| without_meanwhile(&mut plan.lives[life], op));
        }
    }
    plans
}

fn without_meanwhile(life: &mut Life, op: usize) {
    if let Op::Checkpoint { meanwhile, .. } | Op::SlowSync { meanwhile } = &mut life.ops[op] {
        meanwhile.pop();
    }
}
