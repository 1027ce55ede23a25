package kube_test

import (
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Prepare()
	m.Run()
}
