package test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestAgentsConnectAtOnce connects many agents at once, over TLS: each gets the table. One that is told that its turn does
// not come in time tries again, as agents do.
func TestAgentsConnectAtOnce(t *testing.T) { // D34
	const agents = 1000
	p := startPlane(t)
	var connecting sync.WaitGroup
	for i := range agents {
		connecting.Go(func() {
			agent := pod{p, fmt.Sprintf("198.19.%d.%d", 1+i/250, 1+i%250)}
			follow := func() error {
				return agent.follow(t.Context(), func(table []byte) bool { return !bytes.Contains(table, []byte("web.shop")) })
			}
			err := follow()
			for range 100 {
				if status.Code(err) != codes.Unavailable {
					break
				}
				err = follow()
			}
			if err != nil {
				t.Errorf("agent %d: %v", i, err)
			}
		})
	}
	connecting.Wait()
}
