package webhook

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestBudget checks that requests get their bytes in order, and that requests with slow clients are
// ended only when others wait.
func TestBudget(t *testing.T) { // I10
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(10)
		ended := map[string]time.Duration{}
		begun := time.Now()
		take := func(name string, bytes int64) *part {
			t.Helper()
			p := b.take(t.Context(), bytes, func() { ended[name] = time.Since(begun) })
			if p == nil {
				t.Fatalf("%s: no bytes", name)
			}
			return p
		}
		reading, settled := take("reading", 4), take("settled", 6)
		b.settle(settled)
		<-time.After(time.Minute) // of the bubble's clock
		if len(ended) > 0 {
			t.Errorf("ended without need: %v", ended)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if p := b.take(short, 1, func() {}); p != nil {
			t.Error("took bytes that another request holds")
		}
		begun = time.Now()
		var order []string
		for _, name := range []string{"first", "second"} {
			go func() {
				take(name, 4)
				order = append(order, name)
			}()
			synctest.Wait()
		}
		<-time.After(patience)
		synctest.Wait()
		if took, ok := ended["reading"]; !ok || took > patience || len(ended) > 1 || len(order) > 0 {
			t.Errorf("ended are %v, waited have %v", ended, order)
		}
		b.release(reading)
		synctest.Wait()
		b.release(settled)
		synctest.Wait()
		if len(order) != 2 || order[0] != "first" || b.free != 2 || len(b.holders) != 2 {
			t.Errorf("order %v, %d free, %d held", order, b.free, len(b.holders))
		}
	})
}
