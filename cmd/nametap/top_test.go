package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// However many names clients ask for, a bounded number is counted, and no query is left out.
func TestManyKeys(t *testing.T) { // R17
	var out strings.Builder
	c := &tailCommand{by: keyName}
	for i := range 2 * maxKeys {
		for _, name := range []string{"often", fmt.Sprintf("rare%d", i)} {
			if _, err := c.show(&out, &seen.Record{Name: name, Type: "A", Rcode: "SERVFAIL", Source: "self"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(c.counts) != maxKeys+1 || c.counts["often A"].Failed != 2*maxKeys || c.counts[otherKeys].Queries != maxKeys+1 {
		t.Errorf("%d keys, %+v, %+v", len(c.counts), c.counts["often A"], c.counts[otherKeys])
	}
	if err := c.printCounts(&out); err != nil || !strings.HasSuffix(out.String(), fmt.Sprintf("and %d more; --output json has all\n", maxKeys+1-maxRows)) {
		t.Errorf("%v, %s", err, out.String())
	}
}
