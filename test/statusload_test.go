package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	counted := filepath.Join(v.runDir(), "reads")
	for _, tool := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
		real, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nexec %s \"$@\"\n", tool, counted, real)
		if err := os.Chmod(v.write(tool, script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	v.environment = append(v.environment, "PATH="+v.dir+":"+os.Getenv("PATH"))
	v.capture()
	reads := func() int {
		text, err := os.ReadFile(counted)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "\n")
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
	took := time.Since(began)
	each := reads() - before
	t.Logf("%d requests in %v made the agent read %d times", clients*requests, took, each)
	const families = 2
	if most := families * (int(took/time.Second) + 1); each > most {
		t.Errorf("the agent has read the rules %d times, want at most %d", each, most)
	}
}
