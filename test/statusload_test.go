package test

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// TestStatusOfMany checks that many clients that ask for the status at a time make the agent read the rules
// once a second, and not once for each.
func TestStatusOfMany(t *testing.T) { // R9
	t.Parallel()
	v := newVM(t, "nft")
	ran := v.countTools()
	v.capture()
	reads := func() (n int) {
		for _, tool := range ran() {
			if strings.HasSuffix(tool, "-nft-save") {
				n++
			}
		}
		return n
	}
	v.get("/debug/status")
	before, began := reads(), time.Now()
	if before == 0 {
		t.Error("the reads are not counted")
	}
	var asking sync.WaitGroup
	const clients, requests = 16, 5
	for range clients {
		asking.Go(func() {
			for range requests {
				if got := v.get("/debug/status"); !strings.Contains(got, `"state": "in place"`) {
					t.Errorf("%s", got)
				}
			}
		})
	}
	asking.Wait()
	const families = 2
	each, most := reads()-before, families*(int(time.Since(began)/time.Second)+2)
	if each > most || each > clients*requests/2 {
		t.Errorf("%d requests made the agent read the rules %d times, want at most %d", clients*requests, each, most)
	}
}
