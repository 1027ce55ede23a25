package hosts

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

// D12: many Sidecars with long labels take little time, to be read and for each client of their namespace, which waits
// with all others meanwhile.
func TestManySidecars(t *testing.T) {
	const sidecars, clients = 10_000, 500
	long := strings.Repeat("x", 2000)
	var all []object.Object
	for i := range sidecars {
		all = append(all, object.Object{Key: key(object.KindSidecar, fmt.Sprint("s", i)), Sidecar: &object.Sidecar{Labels: map[string]string{long: strconv.Itoa(i)}}})
	}
	h := New(domain, 1, NewVIPs())
	began, before := time.Now(), allocated()
	h.Update(Change{Updated: all})
	read := time.Since(began)
	if n := allocated() - before; n > sidecars*4<<10 {
		t.Errorf("reading allocated %d MiB", n>>20)
	}
	for range clients {
		if h.Sidecar("shop", NewLabels(map[string]string{"app": "web"})) != (Limit{}) {
			t.Fatal("a Sidecar selects a client without its labels")
		}
	}
	if got := h.Sidecar("shop", NewLabels(map[string]string{long: "7"})); got.Key.Name != "s7" {
		t.Errorf("the Sidecar of a client is %v, want s7", got.Key)
	}
	chosen := time.Since(began) - read
	t.Logf("read in %v, chosen in %v", read, chosen)
	if read > 5*time.Second || chosen > 2*time.Second {
		t.Errorf("%d Sidecars were read in %v, and chosen for %d clients in %v", sidecars, read, clients, chosen)
	}
}
